#!/bin/bash
# heliostat: one node of `lab` on this host; its config comes on standard input
exec /PYTHON /HOME/clusters/lab/agent.pyz node
