"""Figures for the README, as ratios against peers measured in the same run. Run `python -m benchmarks --help`."""
