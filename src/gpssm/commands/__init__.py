"""The verbs of the command line, each small over the Python API; `gpssm.cli` puts them together."""
