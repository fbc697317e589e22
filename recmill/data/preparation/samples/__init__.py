"""From the events of whole users to their samples, in numpy: the same function for every engine."""
