"""What may be wrong with a log, found before it appears: nulls, duplicates, days that stand out, leaks.

findings.py says what a finding is; events.py looks at the events, on the engine that prepares them; samples.py looks at
the samples that were made of them.
"""
