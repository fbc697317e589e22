"""Print the requirements of pyproject.toml, one per line: `python requirements.py [EXTRA...]`.

Images install dependencies in a separate layer, before the code is copied, so that a code change does not reinstall
torch.
"""

import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
print(*project["dependencies"], sep="\n")
for extra in sys.argv[1:]:
    print(*project["optional-dependencies"][extra], sep="\n")
