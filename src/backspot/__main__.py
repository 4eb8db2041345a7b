"""``python -m backspot`` is ``backspot``."""

import sys

from backspot.commands import main

if __name__ == "__main__":
    sys.exit(main())
