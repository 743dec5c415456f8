"""The simulator: the machines of the protocol on a virtual network, with injected faults.

Whatever happens, happens again under the same seed:

    from moshpit.sim.scenario import load
    from moshpit.sim.simulate import run

    result = run(load("crash"), seed=7)
    assert result.ok, result.findings
"""
