import sys

from ptlf.cli import main

sys.exit(main())
