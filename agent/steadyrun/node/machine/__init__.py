"""Pure decisions of a node's watchdog: events with their time go in, commands come out; nothing here waits or acts."""
