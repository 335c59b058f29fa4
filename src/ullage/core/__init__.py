"""The foundation: layouts, batches and their movement, errors, and what every room builds on.

Its modules are imported each by its own name, so that what reads a checkpoint loads ``layout`` and ``errors`` with
numpy and never the torch of ``batch``. What users call is offered by ``ullage`` itself.
"""
