"""Results as text: rich tables on a terminal, HTML in a notebook, plain text elsewhere. Computes nothing new."""
