"""The torch worker of `pipeline`: a job file goes in, JSON lines come out.

Importing the package imports no torch: what is said first is said before that takes its seconds.
"""

__version__ = "0.1.0"
