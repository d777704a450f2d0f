"""The page's style sheet and script. Nothing is loaded from anywhere; without the script everything stays readable."""

from __future__ import annotations

from typing import Final

__all__ = ["SCRIPT", "STYLE"]

STYLE: Final = """
:root{color-scheme:light dark;--paper:#fff;--card:#f7f8fa;--ink:#1b222c;--dim:#5d6878;--line:#dfe3ea;--mark:#eef1f5;
--bad:#b3261e;--bad-soft:#fdeeec;--wait:#9a5b00;--wait-soft:#fff6e5;--ok:#0b6b43;--ok-soft:#e9f6ef;--info:#2456b8;
--info-soft:#eaf0fc;--edge:#7b8696;--mono:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
@media (prefers-color-scheme:dark){:root{--paper:#0f141a;--card:#161c24;--ink:#e3e8ef;--dim:#97a3b4;--line:#2a333f;
--mark:#1d2530;--bad:#ff8078;--bad-soft:#341a1a;--wait:#f2b350;--wait-soft:#2f2412;--ok:#5fd09a;--ok-soft:#12291f;
--info:#8db2ff;--info-soft:#182440;--edge:#7d899a}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,"Liberation Sans",sans-serif}
main{max-width:1112px;margin:0 auto;padding:1.4rem 1rem 4rem}
h1{font-size:1.5rem;line-height:1.3;font-weight:650;margin:.5rem 0 .8rem;overflow-wrap:anywhere;letter-spacing:-.01em}
h1.long{font-size:1.22rem;line-height:1.38}
h2{font-size:1.08rem;font-weight:650;margin:2.4rem 0 .3rem;padding-top:1.1rem;border-top:1px solid var(--line)}
h3{font-size:.95rem;font-weight:600;margin:1.2rem 0 .4rem}
p{margin:.35rem 0}a{color:var(--info)}
.dim{color:var(--dim)}.lead{color:var(--dim);margin:.1rem 0 .8rem;max-width:75ch}
.top{display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;color:var(--dim);font-size:.87rem;align-items:baseline}
.top b{color:var(--ink);font-weight:600}
.chip{display:inline-block;border-radius:99px;padding:.05rem .6rem;font-size:.8rem;font-weight:600;white-space:nowrap;
background:var(--mark);color:var(--dim)}
.chip.bad{background:var(--bad-soft);color:var(--bad)}.chip.wait{background:var(--wait-soft);color:var(--wait)}
.chip.ok{background:var(--ok-soft);color:var(--ok)}.chip.info{background:var(--info-soft);color:var(--info)}
nav{display:flex;flex-wrap:wrap;gap:.1rem 1rem;font-size:.87rem;margin:1rem 0 0}
nav a{text-decoration:none}nav a:hover{text-decoration:underline}
.facts{display:flex;flex-wrap:wrap;gap:1px;background:var(--line);border:1px solid var(--line);border-radius:10px;
overflow:hidden;margin:.9rem 0}.facts div{flex:1 1 8.2rem;min-width:0;
padding:.5rem .8rem;background:var(--card)}
.facts .big{flex:1.6 1 11rem}
.facts dt{color:var(--dim);font-size:.78rem}.facts dd{margin:0;overflow-wrap:anywhere;font-weight:550}
.facts dd{max-width:17rem}
.facts dd small{display:block;max-width:13rem;font-weight:400;color:var(--dim);font-size:.82rem}dl{margin:0}
.meter{display:inline-block;width:5.2em;height:.5em;border-radius:9px;background:var(--line);overflow:hidden;
vertical-align:.08em;margin-right:.5em}.meter i{display:block;height:100%;background:var(--ink)}
.decision{border-left:3px solid var(--info);padding:.25rem 0 .25rem .8rem;margin:.9rem 0}
.finding{border:1px solid var(--line);border-radius:10px;padding:.7rem .9rem;margin:.6rem 0}
.finding p{overflow-wrap:anywhere}.finding p b{font-weight:600}
.notes{margin:.4rem 0;padding-left:1.2rem}.notes li{margin:.2rem 0;overflow-wrap:anywhere}
code,.code{font-family:var(--mono);font-size:.88em}
pre{margin:.4rem 0;padding:.65rem .8rem;background:var(--card);border:1px solid var(--line);border-radius:8px;
overflow-x:auto;font:12.5px/1.5 var(--mono);tab-size:4}pre .lib{color:var(--dim)}pre .own{font-weight:600}
pre .th{color:var(--info)}
.scroll{overflow-x:auto;-webkit-overflow-scrolling:touch}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.36rem .9rem .36rem 0;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--dim);font-weight:500;white-space:nowrap}td.num,th.num{text-align:right}td.wide{overflow-wrap:anywhere;
min-width:11rem}
td[data-k=node],td[data-k=backend],td[data-k=since]{white-space:nowrap}
tr.bad td:first-child{box-shadow:inset 3px 0 var(--bad);padding-left:.6rem}
details{margin:.45rem 0}summary{cursor:pointer;padding:.15rem 0;overflow-wrap:anywhere}
summary:focus-visible,a:focus-visible{outline:2px solid var(--info);outline-offset:2px;border-radius:3px}
details.group>summary{font-weight:550}
/* chain of waits */
svg{display:block}svg text{fill:var(--ink);font-size:13px}svg .dim{fill:var(--dim)}
.chain{width:100%;height:auto;margin:.6rem auto 1rem}
.chain rect{fill:var(--card);stroke:var(--line)}
.chain .bad rect{fill:var(--bad-soft);stroke:var(--bad);stroke-width:1.6}
.chain .wait rect{fill:var(--wait-soft);stroke:var(--wait);stroke-opacity:.55}.chain .rest rect{stroke-dasharray:4 3}
.chain .cls{fill:var(--bad);font-weight:650;font-size:12px}.chain .who{font-weight:650;font-size:14px}
.chain .dim{font-size:12.5px}.chain .code{font-family:var(--mono);font-size:12px}
.chain .why{fill:var(--dim);font-size:12px;font-style:italic;paint-order:stroke;stroke:var(--paper);stroke-width:5px;
stroke-linejoin:round}.chain .box .why{stroke:none}.mid{text-anchor:middle}
.edge{fill:none;stroke:var(--edge);stroke-width:1.4}.tip{fill:var(--edge)}.edge.ring{stroke:var(--bad);stroke-width:1.8}
.tip.ring{fill:var(--bad)}.narrow{display:none}
/* lanes */
.lanes{border-top:1px solid var(--line)}
.lane{display:grid;grid-template-columns:218px minmax(0,1fr);gap:0 16px;padding:.4rem 0;
border-bottom:1px solid var(--line)}
.lane.axis-row{padding:.2rem 0 .1rem}
.who{font-size:.88rem;line-height:1.35;min-width:0;overflow-wrap:anywhere;padding-left:.6rem;
border-left:3px solid var(--line)}
.culprit>.who{border-color:var(--bad)}.victim>.who{border-color:var(--wait)}.fine>.who{border-color:var(--ok)}
.axis-row>.who{border-color:transparent}
.who b{font-weight:600}.who span{display:block;color:var(--dim);font-size:.82rem}
svg.axis{overflow:visible}svg.axis text{font-size:11.5px;font-variant-numeric:tabular-nums}
.track{overflow:hidden}.track text{font-size:12px;pointer-events:none}.quiet{fill:var(--mark)}
.bar rect{fill:var(--wait-soft);stroke:var(--wait);stroke-opacity:.45}
.bar.head rect{fill:var(--wait);fill-opacity:.32;stroke:var(--wait);stroke-opacity:1;stroke-width:1.5}
.culprit .bar.head rect{fill:var(--bad);fill-opacity:.2;stroke:var(--bad)}
.bar.failed rect{fill:var(--bad-soft);stroke:var(--bad)}
.bar.silence rect{fill:var(--bad-soft);stroke:var(--bad);stroke-dasharray:4 3;stroke-width:1.3}
.bar.nothing rect{fill:none;stroke:var(--dim);stroke-dasharray:2 4}.bar.nothing text{fill:var(--dim)}
.bar.section rect{fill:var(--info);fill-opacity:.17;stroke:none}
.bar.section text{fill:var(--dim);font-size:10.5px}
.tick line{stroke:var(--dim);stroke-width:1.4}.tick.done line{stroke:var(--ok);stroke-width:2}
.tick.step line{stroke:var(--info)}.tick.fault line{stroke:var(--bad);stroke-width:2.4}
.arrivals{margin:.3rem 0}
.arrivals path{stroke:var(--wait);stroke-width:2px;vector-effect:non-scaling-stroke;opacity:.75;fill:none}
.culprit .arrivals path{stroke:var(--bad)}
.lane details{grid-column:2;margin:.1rem 0 0;font-size:.82rem;color:var(--dim)}
.key{display:flex;flex-wrap:wrap;gap:.15rem 1.1rem;font-size:.82rem;color:var(--dim);margin:.5rem 0}
.key i{display:inline-block;width:1.5em;height:.75em;border-radius:3px;margin-right:.45em;vertical-align:-.03em;
border:1.5px solid var(--wait)}.key .k-head{background:color-mix(in srgb,var(--wait) 32%,transparent)}
.key .k-open{background:var(--wait-soft);border-color:color-mix(in srgb,var(--wait) 45%,transparent)}
.key .k-silence{background:var(--bad-soft);border:1.5px dashed var(--bad)}
.key .k-section{background:color-mix(in srgb,var(--info) 17%,transparent);border-color:transparent}
.key .k-quiet{background:var(--mark);border-color:var(--line)}
.key .k-issued,.key .k-done,.key .k-step,.key .k-fault{width:0;border:0;border-left:2px solid var(--dim);
border-radius:0}
.key .k-done{border-color:var(--ok)}.key .k-step{border-color:var(--info)}.key .k-fault{border-color:var(--bad)}
/* timeline */
.times{list-style:none;margin:.5rem 0;padding:0}
.times li{display:grid;grid-template-columns:7.6em 5.6em 9.5em minmax(0,1fr);gap:0 .8rem;padding:.22rem 0;
border-bottom:1px solid var(--line);font-size:.9rem}
.times time{font-variant-numeric:tabular-nums;color:var(--dim)}.times div{overflow-wrap:anywhere}
.times .all{grid-column:3/-1}.log{font:12.5px/1.5 var(--mono)}
@media (max-width:740px){main{padding:1rem .9rem 3rem}h1,h1.long{font-size:1.18rem}.wide-only{display:none}
.narrow{display:block}thead{display:none}tr{display:block;padding:.45rem 0;border-bottom:1px solid var(--line)}
td{display:grid;grid-template-columns:6em minmax(0,1fr);padding:.08rem 0;border:0;overflow-wrap:anywhere;
white-space:normal!important}
td::before{content:attr(data-k);color:var(--dim)}td:empty{display:none}td>.chip{justify-self:start}
tr.bad{box-shadow:inset 3px 0 var(--bad);padding-left:.6rem}
tr.bad td:first-child{box-shadow:none;padding-left:0}
.lane{grid-template-columns:minmax(0,1fr);gap:.25rem}.lane details{grid-column:1}.who{padding-left:.5rem}
.who span{display:inline;margin-left:.5em}.facts div,.facts .big{flex:1 1 8.6rem}
.axis-row>.who{display:none}.times li{grid-template-columns:auto auto minmax(0,1fr)}.times div{grid-column:1/-1}
.lane.axis-row{position:static}}
@media print{:root{--paper:#fff;--card:#fff;--ink:#000}main{max-width:none;padding:0}nav{display:none}
.finding,.lane,pre,table,.chain{break-inside:avoid}h2{break-after:avoid}pre{white-space:pre-wrap}}
"""

SCRIPT: Final = """
addEventListener("beforeprint",()=>document.querySelectorAll("details").forEach(d=>{d.dataset.was=d.open;d.open=true}));
addEventListener("afterprint",()=>document.querySelectorAll("details").forEach(d=>{d.open=d.dataset.was==="true"}));
"""
