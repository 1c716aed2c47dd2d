"""Whether the strong model would rescue an answer: features, training, measures, the model file.

``cli/route.py`` trains and evaluates; what routes requests scores them with ``classifier.py``.
Which requests go where is not decided here. Nothing here opens a connection.
"""
