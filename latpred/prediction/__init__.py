"""From a graph and a profile to a latency: kernel times, pricing, the two clocks, crossover. Numpy only."""
