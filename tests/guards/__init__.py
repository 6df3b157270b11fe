"""Guards: what must stay as it is while the code around it changes, kept as files and compared by `test_guards.py`.

`python tests/guards/keep.py [graphs] [predictions] [journals]` writes them anew, on purpose.
"""
