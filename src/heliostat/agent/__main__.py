import importlib
import os
import sys

if __package__:
    from .main import main
else:  # called by the path of this directory: that Python does not need to have Heliostat installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    main = importlib.import_module("agent.main").main

sys.exit(main())
