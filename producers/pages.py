"""The page at /docs, with its assets from this machine: what FastAPI serves by itself loads them from a CDN."""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

_PAGE = "/docs"
_ASSETS = f"{_PAGE}/assets"


def add_docs(app: FastAPI) -> None:
    """Swagger UI for an app that was made with `docs_url=None`."""
    app.mount(_ASSETS, StaticFiles(directory=str(files("fastapi_offline") / "static")))
    app.add_route(_PAGE, _show, include_in_schema=False)


async def _show(request: Request) -> Response:
    root = request.scope.get("root_path", "").rstrip("/")
    assets = f"{root}{_ASSETS}"
    return get_swagger_ui_html(
        openapi_url=f"{root}{request.app.openapi_url}",
        title=request.app.title,
        swagger_js_url=f"{assets}/swagger-ui-bundle.js",
        swagger_css_url=f"{assets}/swagger-ui.css",
        swagger_favicon_url=f"{assets}/favicon.png",
        swagger_ui_parameters={"validatorUrl": None},  # which would be a foreign host
    )
