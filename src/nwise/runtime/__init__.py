"""The runtime, which executes schedules in one process or several::

    step, structure                     a step as a whole or not at all, and what it may change
    work                                a rank's part of a schedule
    engine, due                         the calls of a rank, and gradients that are due in later ones
    mailbox                             results on their way from the task that makes them to those that read them
    processes, launch, modules          which stages are where, and the exchange between ranks
    calls                               what a rank does, and the calls that all ranks make
    sums                                sums over sets of stages
    compression, shapes                 what travels

Several processes also load::

    watch                               the first error of any rank, told to all
    post, connections, channel          the mailbox of several processes, and the messages that are pushed between two
    replicas                            the sums of gradients
"""

from functools import partial

from nwise.lazy import submodule

__getattr__ = partial(submodule, __name__)
