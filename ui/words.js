// Texts in the reader's language, and figures as people read them.

const CHINESE = {
  "Runs": "运行", "Machine": "机器与存储", "Compare": "比较", "Filter": "筛选", "State": "状态", "all": "全部", "Pipeline": "流水线",
  "Run": "运行", "Started": "开始", "Took": "耗时", "Stages": "阶段", "Figures": "指标", "running": "运行中", "cut_off": "中断",
  "succeeded": "成功", "failed": "失败", "interrupted": "已停止", "done": "完成", "cached": "缓存", "skipped": "跳过", "started": "进行中",
  "waiting": "等待", "Graph": "图", "Timeline": "时间线", "Training": "训练", "Results": "结果", "Stage": "阶段", "Kind": "类型",
  "Memory": "内存", "Why": "原因", "Parameters": "参数", "Inputs": "输入", "Outputs": "输出", "Log": "日志", "Warnings": "警告",
  "What to do": "怎么办", "Choose a stage": "选择一个阶段", "Close": "关闭", "Show rows": "显示数据", "Show": "显示", "Smoothing": "平滑",
  "Step": "步", "Tokens": "词元", "Time": "时间", "Across": "横轴", "Save picture": "保存图片", "Save table": "保存表格", "As a table": "表格",
  "No runs yet": "还没有运行", "Nothing matches": "没有匹配项", "No training in this run": "此运行没有训练", "Gates": "门槛",
  "Published": "已发布", "Differences": "差异", "no parameter differs": "参数没有差异", "Devices": "设备", "Store": "存储", "Size": "大小",
  "Own": "独占", "Results kept": "结果数", "Name": "名称", "Loading": "加载中", "Sweep": "扫描", "Open sweep": "展开扫描", "Fold sweep": "收起扫描",
  "trained": "参与训练", "row": "行", "document": "文档", "padding": "填充", "Files": "文件", "best": "最佳", "Language": "语言", "Host": "主机",
  "Failures": "失败", "holds": "满足", "does not hold": "不满足", "Key": "键", "Reset zoom": "重置缩放", "Free": "可释放", "In use by": "使用者",
  "Back to all runs": "返回所有运行", "Choose two runs or more to compare them": "选择两个或更多运行进行比较", "Rows": "行", "of": "共",
  "The stage has logged no steps": "该阶段没有步骤记录", "Results of this run": "此运行的结果", "nothing": "无",
  "to come": "计划", "Reports": "报告", "Leased by": "租用者", "another run": "另一个运行", "free": "空闲", "Parallel coordinates": "平行坐标", "Figure": "指标",
  "over": "随", "linear": "线性", "Speed-up and efficiency": "加速比与效率", "Lengths": "长度", "Documents": "文档数", "cut to": "截断至",
  "left out": "未采用", "without a token to train on": "没有可学内容", "of the first rows": "前若干行",
};

const KEY = "pipeline.language";

export function language() {
  return localStorage.getItem(KEY) || (navigator.language.startsWith("zh") ? "zh" : "en");
}

export function speak(chosen) {
  localStorage.setItem(KEY, chosen);
  document.documentElement.lang = chosen;
}

/** A text in the reader's language. */
export const t = (text) => (language() === "zh" && CHINESE[text]) || text.replace("_", " ");

export function seconds(value) {
  if (value === null || value === undefined) return "";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value.toFixed(1)} s`;
  const whole = Math.floor(value);
  if (value < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  return `${Math.floor(whole / 3600)} h ${String(Math.floor(whole / 60) % 60).padStart(2, "0")} min`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? value : value.toFixed(1)} ${units[unit]}`;
}

export function ago(time) {
  const past = (Date.parse(time) - Date.now()) / 1000;
  const relative = new Intl.RelativeTimeFormat(language(), { numeric: "auto" });
  for (const [unit, length] of [["day", 86400], ["hour", 3600], ["minute", 60]]) {
    if (Math.abs(past) >= length) return relative.format(Math.round(past / length), unit);
  }
  return relative.format(Math.round(past), "second");
}

/** A number with the digits that tell it from its neighbours; anything else as JSON has it. */
export function figure(value) {
  if (typeof value === "number") {
    if (Number.isInteger(value)) return value.toLocaleString("en-US");
    const size = Math.abs(value);
    return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(3) : String(Number(value.toPrecision(5)));
  }
  if (Array.isArray(value) && value.every((one) => typeof one !== "object")) return value.map(figure).join(", ");
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** A figure with the unit that its name tells. */
export function named(name, value) {
  const last = name.split(/[.]/).pop();
  if (last === "seconds") return seconds(value);
  if (last.endsWith("_bytes")) return bytes(value);
  return figure(value);
}

/** The beginning of a run's id, to the second. */
export const short = (run) => run.slice(0, 15);

/** The values of nested objects under dotted names. */
export function flat(value, name = "", into = []) {
  if (value !== null && typeof value === "object" && !Array.isArray(value)) {
    for (const [key, inner] of Object.entries(value)) flat(inner, name ? `${name}.${key}` : key, into);
  } else {
    into.push([name, value]);
  }
  return into;
}
