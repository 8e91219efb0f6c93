"""``python -m ckda`` is the command ``ckda``."""

import sys

from ckda.cli import main

sys.exit(main())
