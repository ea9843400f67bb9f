"""Search for an order of actions under given costs and a memory limit.

Reading order: ``problem`` -> ``weave`` (an order of forwards and input gradients becomes a whole order) -> ``greedy``,
``rounds``, ``blocks`` (orders to start from) -> ``improve`` (local search) -> ``solve``.
"""
