"""Search spaces as small examples: networks built from their published encodings, and two to draw from at random.

    from functools import partial

    import latpred
    from spaces import nasbench201

    cells = ["|nor_conv_3x3~0|+|skip_connect~0|none~1|+|nor_conv_1x1~0|avg_pool_3x3~1|skip_connect~2|"]
    latpred.predict_many([partial(nasbench201.build, cell) for cell in cells], image=32)
    latpred.predict_many([partial(nasbench201.graph, cell) for cell in cells])  # the same, without building any of them

Nothing here is trained; a network's time does not depend on its weights.
"""
