"""Looks at tables as somebody exported them and says what their columns probably mean, with the evidence.

files.py finds tables in paths, columns.py measures their columns, roles.py and joins.py say which column is the user,
the item or the time and which table joins on what, features.py proposes features. proposal.py puts it together and
document.py writes it as a commented log.yaml.
"""
