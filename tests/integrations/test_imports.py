import subprocess
import sys


def test_ptlf_imports_no_other_training_library():
    code = """
import sys, ptlf, ptlf.integrations, ptlf.freezing, ptlf.cli
print(sorted({"lightning", "pytorch_lightning", "transformers", "accelerate"} & set(sys.modules)))
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
