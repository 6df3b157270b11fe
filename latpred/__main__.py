"""`python -m latpred`: the command `latpred`, where no such script is on the path."""

import os
import sys
from contextlib import suppress

if __name__ == "__main__":  # processes that are spawned load this module too
    with suppress(OSError):  # of a folder that was deleted
        if not sys.flags.safe_path and sys.path[0] == os.getcwd():  # with a torch.py of the user's, perhaps
            sys.path.append(sys.path.pop(0))
    from latpred.cli import main

    main(prog_name="latpred")
