"""``python -m sglang_scout.cli``, where the console script is not on the path."""

import sys

from sglang_scout.cli import main

sys.exit(main())
