"""The runtime, which executes schedules in one process or several::

    step, structure                     a step as a whole or not at all, and what it may change
    work                                a rank's part of a schedule
    engine, due                         the calls of a rank, and gradients that are due in later ones
    mailbox                             results on their way from the task that makes them to those that read them
    processes, launch, modules          which stages are where
    compression, shapes                 what travels

Several processes also load::

    world, watch                        the exchange between ranks, and their errors
    post, channel                       the mailbox of several processes, and the messages that are pushed between two
    replicas                            the sums of gradients
"""

from functools import partial

from nwise.lazy import submodule

__getattr__ = partial(submodule, __name__)
