"""What a run will cost before it begins: a model of time, bytes, memory and money.

`swarm` says who is there, `codecs` what their numbers weigh on the wire, `wire` how long one
averaging takes, `forecast` what that makes of a step and an epoch, `recommend` which way to
average fits best, and why. Arithmetic only: no torch, no network.
"""
