"""How a cell is timed: timer, in-network timing, disturbance, reference speed, visits."""
