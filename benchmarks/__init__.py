"""Scripts that measure: `python benchmarks/NAME.py`, in a clone that is installed by `make install`."""
