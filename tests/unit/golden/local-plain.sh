#!/bin/bash
# heliostat: one node of `lab` on this computer; its config comes on standard input
exec /PYTHON /HOME/clusters/lab/agent.pyz node
