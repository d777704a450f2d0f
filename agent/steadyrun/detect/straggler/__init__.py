"""Who is slow: each rank's own work against that of comparable ranks and against its own habit.

    detector = Detector(StragglerConfig(), roles, world_size, nodes=nodes)
    for alarm in detector.feed(step, busy_s):      # [ranks] seconds, NaN where missing
        ...

Pure: no clock, no input or output. Needs numpy, which ranks must not: imported in agents and tools only.
"""
