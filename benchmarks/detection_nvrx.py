"""N hung processes one after another against NVRx's rank monitor: ``detection_nvrx.py N CHECK_INTERVAL_S LIMIT_S``.

Prints ``delay_s X`` per hang: from the passing of the section's limit to the death of the process.
"""

import importlib
import multiprocessing
import os
import random
import sys
import time


def main() -> None:
    hangs, interval_s, limit_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    os.environ["RANK"] = "0"
    ft = importlib.import_module("nvidia_resiliency_ext.fault_tolerance")
    server = importlib.import_module("nvidia_resiliency_ext.fault_tolerance.rank_monitor_server").RankMonitorServer
    config = ft.FaultToleranceConfig(workload_check_interval=interval_s, rank_section_timeouts={"work": limit_s})
    socket = os.path.abspath("monitor.sock")
    os.environ["FT_RANK_MONITOR_IPC_SOCKET"] = socket
    monitor = server.run_in_subprocess(config, socket, mp_ctx=multiprocessing.get_context("fork"))
    for _ in range(hangs):
        time.sleep(random.uniform(0.0, min(interval_s, 2.0)))  # any phase of its rhythm
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            client = ft.RankMonitorClient()
            client.init_workload_monitoring()
            client.start_section("work")
            os.write(writing, repr(time.monotonic()).encode())
            time.sleep(600)
            os._exit(0)
        os.close(writing)
        entered_s = float(os.read(reading, 100))
        os.close(reading)
        os.waitpid(pid, 0)
        print(f"delay_s {time.monotonic() - entered_s - limit_s:.4f}", flush=True)
    monitor.terminate()
    monitor.join()


if __name__ == "__main__":
    main()
