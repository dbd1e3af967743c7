"""One HTML file that tells a fit to a person: it holds its own script, style and numbers, and asks the network for nothing."""

from gpssm.report.page import render as render
from gpssm.report.page import write_report as write_report
