"""`python -m ster` is `ster`."""

import sys

from ster.cli import main

if __name__ == "__main__":
    sys.exit(main())
