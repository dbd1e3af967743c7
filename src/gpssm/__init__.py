"""Gaussian process state-space models: learn nonlinear dynamics, with honest uncertainty, from noisy time series."""
