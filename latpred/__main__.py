"""`python -m latpred`: the command line of the Python that runs it, where `latpred` is not on the path."""

from latpred.cli import main

if __name__ == "__main__":
    main(prog_name="latpred")
