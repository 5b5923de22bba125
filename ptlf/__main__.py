import os
import sys

from ptlf.cli import main

code = main()
if "RANK" in os.environ:  # one of several: at the interpreter's end gloo's threads now and then abort the process
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
sys.exit(code)
