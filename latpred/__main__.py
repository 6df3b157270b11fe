"""`python -m latpred`: the command `latpred`, where no such script is on the path."""

from latpred.cli import main

if __name__ == "__main__":  # processes that are spawned load this module too
    main(prog_name="latpred")
