"""python -m ellm_serve"""

import sys

from ellm_serve.cli import main

sys.exit(main())
