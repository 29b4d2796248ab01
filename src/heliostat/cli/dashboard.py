"""`heliostat dashboard`"""

from __future__ import annotations

import time

import click

from heliostat.cli.options import CLUSTER, common
from heliostat.cli.output import Output
from heliostat.cluster.manager import ClusterManager
from heliostat.remote.dashboard_proxy import DashboardProxy, redirect_page
from heliostat.state.files import write_atomic


@click.command()
@click.argument("cluster", type=CLUSTER)
@click.option("--open", "in_browser", is_flag=True, help="open it in the browser")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="local port [a free one]")
@click.option(
    "--proxied",
    is_flag=True,
    help="a web proxy that logs people in stands before it: for all of their browsers",
)
@common
@click.pass_obj
def command(out: Output, /, cluster: str, in_browser: bool, port: int, proxied: bool) -> None:
    """Opens a way to the Ray dashboard and prints the local URL, which lets in the first browser that uses it.

    Reconnects by itself; ends with Ctrl-C."""
    manager = ClusterManager()
    folder = manager.find(cluster).folder
    target = manager.dashboard_api(cluster)
    target()  # a cluster that is not up is told now, not in the browser
    proxy = DashboardProxy(target, port=port, proxied=proxied)
    proxy.start()
    page = folder.path / "dashboard.html"
    try:
        out.document({"cluster": cluster, "url": proxy.url}) if out.json else out.data(proxy.url)
        out.say(f"for {'whoever the proxy lets in' if proxied else 'one browser'}; Ctrl-C ends it")
        if in_browser:
            import webbrowser

            write_atomic(
                page, redirect_page(proxy.url)
            )  # not on the browser's command line, which others can read
            webbrowser.open(page.as_uri())
        while manager.store.find(cluster):
            time.sleep(1)
        out.say(f"`{cluster}` has ended")
    except KeyboardInterrupt:
        pass
    finally:
        page.unlink(missing_ok=True)
        proxy.close()
