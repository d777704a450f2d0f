"""What ``steadyctl top`` shows: gathering, folding and drawing."""
