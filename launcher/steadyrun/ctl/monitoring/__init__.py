"""What stands behind ``steadyctl dashboards``."""
