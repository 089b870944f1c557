"""Loads warren_fork into every Python that has this directory in PYTHONPATH, then the image's own sitecustomize."""
import importlib.machinery
import importlib.util
import os
import sys

import warren_fork

_here = os.path.dirname(os.path.abspath(__file__))
_rest = [p for p in sys.path if os.path.abspath(p or ".") != _here]
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", _rest)
if _spec is not None and _spec.loader is not None:
    _module = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)
