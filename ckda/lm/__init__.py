"""Language models from text to tables: token shards, training on one device or many, checkpoints, evaluation, needles.

Nothing is imported here: :mod:`ckda.lm.prepare` needs numpy and tokenizers only, so that its workers start quickly.
"""
