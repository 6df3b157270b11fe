"""A report of one or several models as one HTML file that needs no network: `latpred report`."""
