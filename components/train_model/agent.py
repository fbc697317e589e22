"""The command of a TrainJob's pods: recmill's agent, whose ranks are those of components/train_model/rank.py."""

import sys

from recmill.training.agent import main

if __name__ == "__main__":
    main(sys.argv[1:], worker="components.train_model.rank")
