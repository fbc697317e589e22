"""Print what pyproject.toml asks for, one requirement a line: `python requirements.py [EXTRA...]`.

Images install dependencies in a layer of their own, before the code is there, so that a change of code does not
install torch again.
"""

import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
print(*project["dependencies"], sep="\n")
for extra in sys.argv[1:]:
    print(*project["optional-dependencies"][extra], sep="\n")
