"""Two search spaces to draw from at random: transformer encoders and residual networks.

Published spaces are in `latpred.search.spaces`. Nothing here is trained; a network's time does not depend on its
weights.
"""

from spaces import encoders, residual

SPACES = {"encoders": encoders, "residual": residual}
