"""From an ordinary module and its step to units, a trace, a placement and a plan. No process group, no training state.

Reading order: ``units`` -> ``placeholder`` -> ``interception`` -> ``trace`` -> ``placement`` -> ``plan``.
"""
