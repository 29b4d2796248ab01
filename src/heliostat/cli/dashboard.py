"""`heliostat dashboard`"""

from __future__ import annotations

import time

import click

from heliostat.cli.help import Command
from heliostat.cli.names import cluster_argument
from heliostat.cli.options import common
from heliostat.cli.output import Output
from heliostat.cluster.manager import ClusterManager
from heliostat.remote.dashboard_proxy import DashboardProxy, redirect_page
from heliostat.state.files import write_atomic


@click.command(cls=Command)
@cluster_argument()
@click.option("--open", "in_browser", is_flag=True, help="open the dashboard in a browser")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="local port [a free port]")
@click.option(
    "--proxied",
    is_flag=True,
    help="accept any number of browsers, behind a web proxy that authenticates users",
)
@common
@click.pass_obj
def command(out: Output, /, cluster: str, in_browser: bool, port: int, proxied: bool) -> None:
    """Start a local proxy to the Ray dashboard and print its URL, which only the first browser that opens it can use.

    The proxy reconnects automatically. Ctrl-C stops it."""
    manager = ClusterManager()
    folder = manager.find(cluster).folder
    target = manager.dashboard_api(cluster)
    target()  # raises for a cluster that is not ready
    proxy = DashboardProxy(target, port=port, proxied=proxied)
    proxy.start()
    page = folder.path / "dashboard.html"
    try:
        out.document({"cluster": cluster, "url": proxy.url}) if out.json else out.data(proxy.url)
        out.info(
            f"accepts {'all browsers that the web proxy admits' if proxied else 'one browser'}; Ctrl-C stops it"
        )
        if in_browser:
            import webbrowser

            # not on the browser's command line, which other users can read
            write_atomic(page, redirect_page(proxy.url))
            webbrowser.open(page.as_uri())
        while manager.store.find(cluster):
            time.sleep(1)
        out.info(f"`{cluster}` has ended")
    except KeyboardInterrupt:
        pass
    finally:
        page.unlink(missing_ok=True)
        proxy.close()
