"""The simulator: traces, worlds, policies, figures."""
