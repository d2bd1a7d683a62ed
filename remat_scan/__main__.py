"""`python -m remat_scan`: the same as `remat-scan`."""

import sys

from ._cli import main

if __name__ == "__main__":
    sys.exit(main())
