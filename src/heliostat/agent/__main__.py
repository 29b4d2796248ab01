import os
import sys

if (
    not __package__
):  # called by the path of this folder: then nothing of Heliostat needs to be installed there
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    from agent.main import main  # type: ignore[import-not-found]
else:
    from .main import main

sys.exit(main())
