"""The loss of a step: how it is divided and weighed, computed in chunks with its head, or by a function of one's own.

``divisions`` says how a loss that is not ours divides; the weights of sequences are in ``sequence_weights``; head and
loss in chunks are in ``lazy_logits`` and ``chunked_loss``. Which of these ways the loss of a batch goes is decided in
the step (``step.loss_rule``).
"""
